return 'null'
